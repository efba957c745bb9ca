"""Parts of a request that all dialects share: body, schema, sampling, prompt, model, generation, stream."""
