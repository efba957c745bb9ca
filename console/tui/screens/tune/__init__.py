"""The Tune screen: knobs, the effect of changes, and autotune."""
