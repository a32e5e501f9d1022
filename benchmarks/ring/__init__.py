"""Our own ring as one of the systems that are compared, and nodes that are slowed alike."""
