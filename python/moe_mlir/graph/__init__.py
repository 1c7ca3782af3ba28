"""Reading torch's graphs: what the matcher (`raising`) and the importer both ask of nodes."""
