"""A server for a network: who may connect, and the operators' job queue.

Reading order: `server` (everything of it but jobs), `operator_service` (the operators' gRPC
service, for `isthmus_server.runs.jobs`). Who is a member is decided in `isthmus_server.fleet`.
"""
