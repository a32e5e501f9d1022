"""The options of every command and run, and the messages between nodes: each is declared once."""
