"""The papers' routers, trained side by side at a size that runs in minutes on a CPU."""
