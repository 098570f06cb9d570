"""OpenAI's API over a pool: SGLang's serving classes, with the pool in the place of SGLang's scheduler. Needs sglang."""
