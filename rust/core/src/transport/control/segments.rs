//! Passing the segments of a heap to the peer.
//!
//! The owner announces a segment when it first has something in it for this peer, in a frame with which the descriptor
//! travels (`SCM_RIGHTS`). The peer maps it and answers whether it could; until then, and where it could not, memory is
//! sent as if it lay elsewhere. So nothing refers to a segment that the other side does not have, whatever the order in
//! which the ring and this channel are read. When the owner has given a segment back it says so, at its next look at the
//! channel, and the peer unmaps it; its memory went before that.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

use rustix::fs::fstat;

use super::{Control, Frame};
use crate::heap::{self, Identity, PeerHeap, Sharing};

/// Descriptors whose frames have not been read in whole: a member sends them one by one.
const MAX_ARRIVED: usize = 2;
/// More than this does not wait to be read by a member that keeps announcing segments.
const MAX_UNREAD: usize = 1 << 16;

/// Both sides' segments, as one link knows them.
#[derive(Debug)]
pub(super) struct Segments {
    /// The segments that the peer announced.
    peer: PeerHeap,
    /// Descriptors that came ahead of the end of their frames.
    arrived: VecDeque<OwnedFd>,
    /// The segments announced to the peer, and its answer for each.
    told: HashMap<u32, Option<bool>>,
    /// [`heap::retired`] when `told` was last compared with what there is.
    retired: u64,
    _sharing: Sharing,
}

impl Segments {
    pub(super) fn new() -> Self {
        Self {
            peer: PeerHeap::default(),
            arrived: VecDeque::new(),
            told: HashMap::new(),
            retired: heap::retired(),
            _sharing: Sharing::begin(),
        }
    }

    /// Keeps descriptors until their frame is complete; the rest is closed.
    pub(super) fn keep(&mut self, files: impl Iterator<Item = OwnedFd>) {
        for file in files {
            if self.arrived.len() <= MAX_ARRIVED {
                self.arrived.push_back(file);
            }
        }
    }

    /// Whether descriptors are left that no member would have sent. `complete`: no frame has been read in part.
    pub(super) fn has_strays(&self, complete: bool) -> bool {
        let allowed = if complete { 0 } else { MAX_ARRIVED };
        self.arrived.len() > allowed
    }

    /// The descriptor that was sent with this announcement. There is none when this process had no descriptor left
    /// to receive it in; the next in the queue then belongs to a later frame.
    fn take(&mut self, identity: Identity) -> Option<OwnedFd> {
        let is_it = |file: &OwnedFd| fstat(file).is_ok_and(|stat| stat.st_ino == identity.inode);
        self.arrived
            .front()
            .is_some_and(is_it)
            .then(|| self.arrived.pop_front())?
    }
}

impl Control {
    /// Whether the peer can read segment `segment` of this process's heap in place, as far as is known: see
    /// [`Control::reaches`].
    pub(crate) fn lends(&mut self, segment: u32) -> bool {
        self.reaches(segment).unwrap_or(false)
    }

    /// Whether the peer has mapped segment `segment` of this process's heap; `None` while it has not answered. The first
    /// call for a segment announces it. Costs a look-up, and a system call while the answer is outstanding.
    pub(crate) fn reaches(&mut self, segment: u32) -> Option<bool> {
        if self.segments.is_none() {
            return Some(false);
        }
        match self.segments.as_ref()?.told.get(&segment) {
            Some(Some(mapped)) => return Some(*mapped),
            Some(None) => {
                self.drain();
            }
            None => {
                if let Some(file) = heap::segment_file(segment) {
                    self.announce(segment, file);
                }
            }
        }
        let told = self.segments.as_ref()?.told.get(&segment);
        told.map_or(Some(false), |answer| *answer)
    }

    /// Passes segment `segment`, whose descriptor is `file`, to the peer, once. Does nothing on a channel that passes
    /// none.
    pub(crate) fn announce(&mut self, segment: u32, file: OwnedFd) {
        self.retract_segments();
        let (Some(segments), Ok(identity)) = (&mut self.segments, Identity::of(segment, &file))
        else {
            return;
        };
        if let Entry::Vacant(entry) = segments.told.entry(segment) {
            entry.insert(None);
            self.outbound.push(&Frame::Segment(identity), Some(file));
            self.flush();
        }
    }

    /// The segments of the peer's heap, as far as its announcements have been read. `None` on a channel that passes
    /// none.
    pub(crate) fn peer_heap(&self) -> Option<&PeerHeap> {
        self.segments.as_ref().map(|segments| &segments.peer)
    }

    /// Tells the peer about announced segments that are no longer there. One load when none has gone.
    pub(super) fn retract_segments(&mut self) {
        let Some(segments) = &mut self.segments else {
            return;
        };
        let retired = heap::retired();
        if segments.retired == retired {
            return;
        }
        segments.retired = retired;
        let outbound = &mut self.outbound;
        segments.told.retain(|&segment, _| {
            let live = heap::is_live(segment);
            if !live {
                outbound.push(&Frame::SegmentGone(segment), None);
            }
            live
        });
        self.flush();
    }

    /// The peer announced a segment.
    pub(super) fn admit(&mut self, identity: Identity) {
        let Some(segments) = &mut self.segments else {
            return self.refuse("a segment on a control channel that passes none".to_owned());
        };
        let file = segments.take(identity);
        match segments.peer.admit(identity, file) {
            Ok(_) if self.outbound.len() > MAX_UNREAD => {
                self.refuse("announced segments without reading the answers".to_owned());
            }
            Ok(mapped) => {
                let segment = identity.segment;
                self.send(&Frame::SegmentAnswer { segment, mapped });
            }
            Err(error) => self.refuse(error.message),
        }
    }

    /// The peer answered an announcement. It may have gone meanwhile.
    pub(super) fn answered(&mut self, segment: u32, mapped: bool) {
        let told = self
            .segments
            .as_mut()
            .and_then(|segments| segments.told.get_mut(&segment));
        if let Some(answer) = told {
            *answer = Some(mapped);
        }
    }

    /// The peer gave a segment back.
    pub(super) fn forget(&mut self, segment: u32) {
        if let Some(segments) = &mut self.segments {
            segments.peer.forget(segment);
        }
    }
}

#[cfg(test)]
impl Segments {
    /// How many descriptors wait for their frames.
    pub(super) fn waiting(&self) -> usize {
        self.arrived.len()
    }
}
