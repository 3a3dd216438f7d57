"""Who may take part in a server, and who does now.

Reading order: `authority` (keys and certificates), `registry` (members, in SQLite), `joining`
(tokens), `members` (admission of connections), `remote_authority` and `authority_service` (if the
authority is another process), `presence` and `table` (who is connected).
"""
