"""What a model answers, as events: text, reasoning and calls of tools. Each form has a file; `forms` says which a model has."""
