"""In-context algorithms, and the same algorithms written as attention weights."""
