"""How the embedded models were made: settings, objectives, and a file for each part that is trained."""
