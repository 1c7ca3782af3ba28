"""What every part of the package uses: files, logging, the command line, paths."""
