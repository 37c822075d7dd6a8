"""What updates and stores a student: the toy decoder now, others behind the same base."""
