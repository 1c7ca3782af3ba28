"""How models of torch come in: each module takes one of torch's ways of capturing a graph."""
