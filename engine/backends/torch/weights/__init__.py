"""From a model folder to a decoder in memory: tensors, adapters, weights shared by workers."""
