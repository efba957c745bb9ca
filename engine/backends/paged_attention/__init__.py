"""Attention over KV pages: one face (`face.PagedAttention`), four implementations behind it.

`choose.choose` decides which one fits, `probe.engage` looks at the devices, decides and tries the choice out, and
`face.implementation` gives the function.
"""
