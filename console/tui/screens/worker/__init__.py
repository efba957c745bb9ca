"""The page of one worker."""
