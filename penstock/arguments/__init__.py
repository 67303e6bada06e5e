"""Arguments of the Python interface: their names and types, advice on other names, messages in the words of Python."""
