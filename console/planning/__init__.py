"""`ericllm plan`: how many cards, what when a node dies, where the front end saturates; by simulation."""
