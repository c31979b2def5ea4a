"""Mutual authentication of the two ends of a connection by a shared secret, which is never sent.

Owns the handshake: a challenge and a response each way (HMAC with SHA-256, RFC 2104). Must not know
the messages that follow.

    rank                                  engine's process
      nonce ────────────────────────────►
            ◄──────────────────────────── other nonce, HMAC(secret, "engine", nonce, other nonce)
      HMAC(secret, "rank", nonce, other nonce) ────►

Until then no other and no longer message is accepted. An eavesdropper does not learn the secret,
unless it can be guessed. Later messages are neither encrypted nor signed.
"""

import hmac
import secrets

from charonia.sockets.channel import Channel

SECRET_VARIABLE = "CHARONIA_RANK_SECRET"
"""Environment variable that holds the secret."""
TIMEOUT_S = 20.0
"""Timeout of each message of the handshake. It is long because a machine may be busy; no other
connection waits meanwhile."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def admit_rank(channel: Channel, secret: str) -> bool:
    """The engine's side: whether the other end knows the secret.

    Raises:
        OSError: the connection ended, or no message came in time.
    """
    nonce = channel.receive(TIMEOUT_S)
    if nonce is None or len(nonce) != _NONCE_BYTES:
        return False
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(own_nonce + _proof(secret, b"engine", nonce + own_nonce), TIMEOUT_S)
    proof = channel.receive(TIMEOUT_S)
    return proof is not None and hmac.compare_digest(
        proof, _proof(secret, b"rank", nonce + own_nonce)
    )


def find_engine(channel: Channel, secret: str) -> bool:
    """The rank's side: whether the other end knows the secret.

    Raises:
        OSError: the connection ended, or no message came in time.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(nonce, TIMEOUT_S)
    answer = channel.receive(TIMEOUT_S)
    if answer is None or len(answer) != _NONCE_BYTES + _PROOF_BYTES:
        return False
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"engine", nonces)):
        return False
    channel.send(_proof(secret, b"rank", nonces), TIMEOUT_S)
    return True


MAX_BYTES = _NONCE_BYTES + _PROOF_BYTES
"""Maximum size of a message of the handshake."""


def _proof(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + nonces, "sha256")
