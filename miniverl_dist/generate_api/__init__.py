"""The `/generate` contract of SGLang: wire models, retrying client, server skeleton."""
