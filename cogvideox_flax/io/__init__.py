"""Files: videos in and out; written whole or not at all, locked, trusted, known by their contents."""
