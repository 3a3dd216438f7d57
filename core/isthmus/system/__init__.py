"""Process and file-system services of Linux: file locks, process lifetime, memory."""
