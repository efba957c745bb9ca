"""From logits to token ids: penalties, masks, filters, draws, log-probabilities."""
