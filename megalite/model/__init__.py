"""The transformer, written once: a model family is a row of axis values (`megalite.config.schema.ModelConfig`)."""
