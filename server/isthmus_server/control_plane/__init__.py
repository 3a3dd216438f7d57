"""A server that others can reach: its authority, who has joined, and who may do what.

Reading order: `authority` (keys and certificates), `registry` (who is who, in SQLite), `joining`
(how one gets in), `members` (who is let in), `server` (all of it, running), `queue` and
`runner` (jobs, one after another), `control` (what operators may ask for), `console` (what they
type for it).
"""
