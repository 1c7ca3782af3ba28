"""What must hold for a compiled program to serve a call."""
