"""The Models screen: the models on this machine, the form of a load, and the models loaded."""
