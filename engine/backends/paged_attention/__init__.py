"""Attention over KV pages: one interface (`interface.PagedAttention`), four implementations behind it.

`choose.choose` decides which one fits, `probe.engage` looks at the devices, decides and tries the choice out, and
`interface.implementation` gives the function.
"""
