"""The Doctor page: what this machine has and lacks."""
