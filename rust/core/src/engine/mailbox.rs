//! Where threads that make connections leave mail for the thread that steps the group next.
//!
//! A flag beside the messages says whether there are any, so that a step that finds none costs one load. It is exchanged
//! by a thread that posts as well as by one that takes, and of two exchanges the later one sees what came before the
//! earlier one; the messages themselves are ordered by their lock. Two properties follow:
//!
//! - A message is taken by the next taker after its post, and by one alone.
//! - No message is left behind at an end. A thread that ends the group takes after it has said so, and a thread that posts
//!   looks for the end after it has posted: if the taker's exchange is the earlier one, the poster sees the end.

use std::sync::atomic::Ordering;

use crate::sync::{AtomicBool, Mutex};

/// Messages that have not been read.
pub(crate) struct Mailbox<M> {
    messages: Mutex<Vec<M>>,
    has_mail: AtomicBool,
}

impl<M> Mailbox<M> {
    pub(crate) fn new() -> Self {
        Self {
            messages: Mutex::new(Vec::new()),
            has_mail: AtomicBool::new(false),
        }
    }

    /// Leaves a message. A thread that sleeps on the group must be woken afterwards, and where the group has ended, what
    /// is here must be taken.
    pub(crate) fn post(&self, message: M) {
        self.messages.lock().push(message);
        // The flag is for a taker, and what a taker did before its exchange for this thread.
        self.has_mail.swap(true, Ordering::AcqRel);
    }

    /// The messages posted since the last call.
    pub(crate) fn take(&self) -> Vec<M> {
        if !self.has_mail.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut *self.messages.lock())
    }

    /// Whether something may have been posted.
    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }
}

/// Threads that post, that step the group and that end it, under every interleaving and order that loom can produce.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::{AtomicBool, Mailbox, Ordering};
    use crate::sync::model::{Bell, explore};

    /// A group as far as its mail goes.
    struct Group {
        mailbox: Mailbox<u32>,
        /// As `failure` and `closed` are: said with release, seen with acquire.
        has_ended: AtomicBool,
        bell: Bell,
    }

    impl Group {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                mailbox: Mailbox::new(),
                has_ended: AtomicBool::new(false),
                bell: Bell::new(),
            })
        }

        /// As [`Group::post`](crate::engine::state::Group::post). Returns what this thread had to read itself.
        fn post(&self, message: u32) -> u32 {
            self.mailbox.post(message);
            self.bell.ring();
            match self.has_ended.load(Ordering::Acquire) {
                true => self.read(),
                false => 0,
            }
        }

        fn read(&self) -> u32 {
            self.mailbox.take().into_iter().sum()
        }

        fn end(&self) -> u32 {
            self.has_ended.store(true, Ordering::Release);
            self.read()
        }
    }

    #[test]
    fn loom_mail_is_read_once_though_the_group_ends_meanwhile() {
        explore(None, || {
            let group = Group::new();
            let poster = {
                let group = Arc::clone(&group);
                thread::spawn(move || group.post(1))
            };
            let read = group.end();
            assert_eq!(read + poster.join().unwrap(), 1);
        });
    }

    #[test]
    fn loom_two_post_while_the_group_ends() {
        explore(Some(3), || {
            let group = Group::new();
            let posters = [1, 2].map(|message| {
                let group = Arc::clone(&group);
                thread::spawn(move || group.post(message))
            });
            let mut read = group.end();
            for poster in posters {
                read += poster.join().unwrap();
            }
            assert_eq!(read, 3);
        });
    }

    /// The thread that steps the group looks at the flag before it sleeps.
    #[test]
    fn loom_no_mail_is_slept_past() {
        explore(Some(3), || {
            let group = Group::new();
            let posters = [1, 2].map(|message| {
                let group = Arc::clone(&group);
                thread::spawn(move || group.post(message))
            });
            let mut read = 0;
            while read < 3 {
                if group.mailbox.has_mail() {
                    read += group.read();
                } else {
                    group.bell.sleep();
                }
            }
            for poster in posters {
                assert_eq!(poster.join().unwrap(), 0);
            }
        });
    }
}
