"""An engine elsewhere: its console's link over HTTP."""
