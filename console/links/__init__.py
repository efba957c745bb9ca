"""What screens may ask for beyond `console.link`, by noun: each module has one protocol and what it hands out."""
