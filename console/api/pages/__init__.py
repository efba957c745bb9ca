"""The pages that people open in a browser, each a folder of files that are served as they are."""
