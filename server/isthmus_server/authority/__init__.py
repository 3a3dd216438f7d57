"""The enrolment authority as a process of its own, whose operator is not the server's."""
