"""Cross-tokenizer alignment over bytes, and the credit that it gives to student tokens."""
