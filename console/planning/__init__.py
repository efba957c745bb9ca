"""`ericllm plan`: how many cards, what when a node dies, where the front door saturates; by simulation."""
