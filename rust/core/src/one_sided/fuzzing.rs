//! The fuzz target of one-sided transfers: see `crate::fuzzing`.

use super::remote::RemoteRegion;
use super::request::{LENGTH, REQUESTS, Request};
use super::serve::Location;
use crate::rendezvous::pairing::{self, Invitation};

/// A request, where bytes lie on a device, a remote region, an invitation and a message of a conversation: refused, or one that
/// writes the same bytes.
pub fn one_sided(bytes: &[u8]) {
    if let Ok(bytes) = <&[u8; LENGTH]>::try_from(bytes)
        && let Ok(request) = Request::from_bytes(bytes)
    {
        assert_eq!(request.to_bytes(), *bytes);
        assert!(request.data_tag() > REQUESTS && request.answer_tag() > request.data_tag());
    }
    if let Some(location) = Location::read(bytes, 1) {
        let Location { span, offset } = &location;
        assert!(*offset < span.bytes());
        assert_eq!(Location::write(span, *offset as usize), bytes);
    }
    if let Ok(invitation) = Invitation::from_bytes(bytes) {
        assert_eq!(invitation.to_bytes(), bytes);
    }
    if let Some((key, value)) = pairing::read(bytes) {
        assert_eq!(key.len() + value.len() + 2, bytes.len());
    }
    if let Ok(remote) = RemoteRegion::from_bytes(bytes) {
        assert_eq!(remote.to_bytes(), bytes);
        assert!(
            remote
                .part(remote.len(), 0)
                .is_ok_and(|part| part.is_empty())
        );
    }
}

/// One of each, with their names.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::request::Kind;
    use crate::transport::cuda::span::Span;

    let request = |kind, is_mapped| Request {
        kind,
        is_mapped,
        number: 7,
        region: [5; 16],
        offset: 4096,
        length: 100,
    };
    let remote = RemoteRegion {
        port: [3; 16],
        region: [5; 16],
        is_on_device: false,
        offset: 4096,
        length: 100,
    };
    vec![
        ("write", request(Kind::Write, false).to_bytes().to_vec()),
        ("read", request(Kind::Read, false).to_bytes().to_vec()),
        ("mapped", request(Kind::Read, true).to_bytes().to_vec()),
        ("location", Location::write(&Span::sample(), 3)),
        ("remote", remote.to_bytes().to_vec()),
        ("invitation", Invitation::sample().to_bytes()),
        ("told", pairing::write("rank/1", b"an entry")),
    ]
}
