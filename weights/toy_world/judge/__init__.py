"""How the embedded models are judged: clips are seen, and compared with what their prompts claim."""
