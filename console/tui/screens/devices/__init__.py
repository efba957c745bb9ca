"""The Devices page: every reading of each device."""
