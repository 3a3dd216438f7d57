"""A server for a network: certificates, membership, joining, and the operators' job queue.

Reading order: `authority` (keys and certificates), `registry` (members, in SQLite), `joining`
(tokens), `members` (admission of connections), `server` (everything of it but jobs),
`operator_service` (the operators' gRPC service, for `isthmus_server.jobs`), `commands` (command
line), `remote_authority` (if the authority is another process).
"""
