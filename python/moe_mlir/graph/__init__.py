"""Reading torch's graphs: what the matcher (fx) and the importer both ask of nodes."""
