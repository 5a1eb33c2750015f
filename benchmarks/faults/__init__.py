"""A fault campaign: processes killed, disks that fill, files damaged; nothing wrong, stuck, unexplained or lost."""
