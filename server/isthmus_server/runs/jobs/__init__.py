"""Jobs that operators submit: their queue, and how they run and share the participants."""
