"""Why dialing a head failed, in a few words and with what to change, out of what gRPC says of the call."""

from __future__ import annotations

_NOTHING_CAME_ABOUT = "failed to connect"

_CAUSES = {
    "certificate has expired": "the head's certificate has expired",
    "certificate is not yet valid": "the head's certificate is not valid yet; compare the clocks",
    "CERTIFICATE_VERIFY_FAILED": "the head's certificate is not signed by what --tls-ca names",
    "Hostname Verification": "the head's certificate is for another name than the one dialed",
    "WRONG_VERSION_NUMBER": "the head does not speak TLS there; leave --tls-ca out, or give it a certificate",
    "TSI_PROTOCOL_FAILURE": "the TLS handshake failed",
    "parsing HTTP/2": "what listens there is no head",
    "onnection refused": "nothing listens there",
    "name not found": "its name is not found",
    "host not found": "its name is not found",
    "imed out": "it does not answer",
    "handshaker shutdown": "it does not answer",
}
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe")


def dial_cause(details: str, *, with_tls: bool) -> str:
    """The cause; "" when it is none that is known."""
    for words, cause in _CAUSES.items():
        if words in details:
            return cause
    if not any(words in details for words in _CLOSED):
        return ""
    if _NOTHING_CAME_ABOUT not in details:
        return "the connection was lost"
    if with_tls:
        return "it closes the connection; it may ask for a certificate: give --tls-cert and --tls-key"
    return "it closes the connection; it may speak TLS: name what signed its certificate with --tls-ca"
