"""IR text in, code out: in this process, from the disk cache, or with a crash report."""
