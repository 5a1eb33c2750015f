"""Files: video readers and writers, atomic writes, locks, private directories, content hashes."""
