"""Teacher: rendering of student text for the teacher, prefill scorer, HTTP app and client."""
