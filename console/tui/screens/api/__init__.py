"""The API screen: address, keys, dialects, clients and failures."""
