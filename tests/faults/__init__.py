"""A fault campaign: kills processes, fills disks and damages files, and checks that no work is wrong, stuck or lost."""
