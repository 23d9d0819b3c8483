//! Pairs of processes: one that lets others come to it, the host, and one after the other its guests.
//!
//! The host gives an [`Invitation`] away. It says where the host is, holds the host's public key, and a key pair that all
//! guests have. With these a guest begins a conversation ([`Conversation`]), whose handshake proves to each side that the
//! other holds its key; so no guest can pose as the host, and nothing that one guest says reaches another.
//!
//! The two then form a group of their own, with new keys. The conversation is the store of that group: each side keeps the
//! values that either has set, and tells the other its own. So the host keeps nothing of a guest once that has joined or gone.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::secret::Secret;
use super::store::{Store, check_key, check_value, not_set};
use crate::config::{Config, TransportChoice};
use crate::error::{Code, Error, Result};
use crate::fork::Home;
use crate::locks::Mutex;
use crate::transport::Link;
use crate::transport::endpoint::{
    self, Address, ConnectRequest, Conversation, Endpoint, EndpointOptions, Gate, Lane, Seat,
    Verdict,
};
use crate::transport::keys::{GroupKey, KeyPair, PublicKey};
use crate::types::Rank;

/// The rank of the host in the group of the conversation, and that of all guests.
const HOST: Rank = 0;
const GUEST: Rank = 1;

/// How long one message to the other side may take.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two attempts of a guest.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The most messages of one side: far more than two ranks that form a group send.
const MOST_MESSAGES: usize = 64;

const MAGIC: &[u8; 8] = b"uniport\x02";
const CHECK: usize = 8;

/// The name that a host chooses for itself.
pub(crate) type Card = [u8; 16];

/// The data that a guest needs. It holds a secret: a process that has it can come, and no more.
///
/// It travels as
///
/// ```text
/// magic "uniport" and version 2 (8)  card (16)  public key of the host (32)  public and private key of guests (64)
/// address of the host  check: the first bytes of the SHA-256 of all before (8)
/// ```
#[derive(Clone)]
pub(crate) struct Invitation {
    card: Card,
    host: PublicKey,
    guest: Arc<KeyPair>,
    address: Address,
}

impl Invitation {
    /// To be given away.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.card);
        bytes.extend(self.host);
        bytes.extend(self.guest.to_bytes());
        bytes.extend(self.address.to_bytes());
        let check = Sha256::digest(&bytes);
        bytes.extend(&check[..CHECK]);
        bytes
    }

    /// Reads an invitation that was given away as `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` when they are none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::read(bytes).ok_or_else(|| {
            Error::invalid(
                "these bytes are no address of a port: `bind` returns one; or another version made it, or it was damaged on its way",
            )
        })
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (content, check) = bytes.split_last_chunk::<CHECK>()?;
        let (magic, rest) = content.split_first_chunk::<8>()?;
        let (card, rest) = rest.split_first_chunk()?;
        let (host, rest) = rest.split_first_chunk()?;
        let (guest, address) = rest.split_first_chunk()?;
        let is_whole = magic == MAGIC && Sha256::digest(content)[..CHECK] == *check;
        is_whole.then_some(())?;
        Some(Self {
            card: *card,
            host: *host,
            guest: Arc::new(KeyPair::from_bytes(guest)),
            address: Address::from_bytes(address).ok()?,
        })
    }

    #[cfg(test)]
    pub(crate) fn sample() -> Self {
        let [address, _] = Address::samples();
        Self {
            card: [3; 16],
            host: [5; 32],
            guest: Arc::new(KeyPair::from_bytes(&[7; KeyPair::BYTES])),
            address,
        }
    }

    pub(crate) fn card(&self) -> Card {
        self.card
    }

    /// The keys of the conversation for the side that holds `own`.
    fn key(&self, own: &Arc<KeyPair>) -> GroupKey {
        let members = vec![self.host, self.guest.public()];
        GroupKey::new(Arc::clone(own), (members, b""), [0; 32], true)
    }

    /// The secret that only the host and its guests know.
    fn secret(&self) -> Secret {
        Secret::from_bytes(&self.guest.to_bytes())
    }
}

impl std::fmt::Debug for Invitation {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Invitation({})", self.address)
    }
}

/// The process that lets guests come.
pub(crate) struct Host {
    invitation: Invitation,
    key: GroupKey,
    /// It keeps the endpoint open to other hosts.
    seat: Seat,
    is_closed: Arc<AtomicBool>,
    home: Home,
}

/// Where guests arrive.
struct Door<F> {
    secret: Secret,
    is_closed: Arc<AtomicBool>,
    receive: F,
}

impl<F: Fn(Pair) + Send + Sync> Gate for Door<F> {
    /// A conversation is all that a guest may begin here.
    fn admit(&self, _: Rank, _: Lane) -> Verdict {
        Verdict::Left
    }

    fn established(&self, _: Rank, _: Lane, mut link: Box<dyn Link>) {
        link.send_farewell();
    }

    fn striped(&self, _: Rank, _: Lane, _: crate::transport::Stripe) {}

    fn conversed(&self, _: Rank, mut conversation: Conversation) {
        conversation.end_with(Arc::clone(&self.is_closed));
        (self.receive)(Pair::new(conversation, self.secret.clone(), None));
    }
}

impl Host {
    /// Lets guests come, and gives each of them to `receive`, which must not block.
    ///
    /// # Errors
    /// `InvalidArgument` for an interface that is not there, `System` when no port can be had.
    pub(crate) fn open(
        config: &Config,
        card: Card,
        receive: impl Fn(Pair) + Send + Sync + 'static,
    ) -> Result<Self> {
        let seat = Endpoint::global(&options(config, None))?;
        let own = Arc::new(KeyPair::random()?);
        let invitation = Invitation {
            card,
            host: own.public(),
            guest: Arc::new(KeyPair::random()?),
            address: seat.address().clone(),
        };
        let key = invitation.key(&own);
        let is_closed = Arc::new(AtomicBool::new(false));
        let door = Door {
            secret: invitation.secret(),
            is_closed: Arc::clone(&is_closed),
            receive,
        };
        seat.register(key.clone(), HOST, 2, Arc::new(door))?;
        Ok(Self {
            invitation,
            key,
            seat,
            is_closed,
            home: Home::here(),
        })
    }

    /// The invitation for guests. It holds a secret.
    pub(crate) fn invitation(&self) -> &Invitation {
        &self.invitation
    }

    /// Lets no guest in any more, and ends conversations under way.
    pub(crate) fn close(&self) {
        if self.home.is_here() {
            self.is_closed.store(true, Ordering::Release);
            self.seat.unregister(&self.key.id(), HOST);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.close();
    }
}

fn options(config: &Config, towards: Option<SocketAddr>) -> EndpointOptions {
    EndpointOptions {
        host: config.host.clone(),
        interface: config.interface.clone(),
        hint: endpoint::hint(),
        towards,
        // Those that come need not have been launched with this process.
        one_host: false,
        ring_bytes: config.ring_bytes.bytes(),
    }
}

/// The conversation of a host and a guest as the store of the group that they form.
pub(crate) struct Pair {
    talk: Mutex<Talk>,
    secret: Secret,
    address: Option<SocketAddr>,
}

struct Talk {
    conversation: Conversation,
    values: HashMap<String, Vec<u8>>,
    /// Messages that may still come.
    left: usize,
}

impl Pair {
    fn new(conversation: Conversation, secret: Secret, address: Option<SocketAddr>) -> Self {
        Self {
            talk: Mutex::new(Talk {
                conversation,
                values: HashMap::new(),
                left: MOST_MESSAGES,
            }),
            secret,
            address,
        }
    }

    /// Comes to the host of the invitation as a guest.
    ///
    /// # Errors
    /// `Timeout` when it does not let this process in within `patience`.
    pub(crate) fn visit(
        invitation: &Invitation,
        config: &Config,
        patience: Duration,
    ) -> Result<Self> {
        let deadline = Instant::now() + patience.min(Duration::from_secs(365 * 86_400));
        let address = invitation.address.tcp().first().copied();
        let seat = Endpoint::global(&options(config, address))?;
        let never = AtomicBool::new(false);
        loop {
            let request = ConnectRequest {
                key: &invitation.key(&invitation.guest),
                from: GUEST,
                to: HOST,
                known_as: (GUEST, HOST),
                lane: Lane::PointToPoint,
                target: &invitation.address,
                deadline,
                silence: None,
                transport: TransportChoice::Tcp,
                cancelled: &never,
                turn: None,
            };
            let error = match seat.converse(&request) {
                Ok(conversation) => {
                    return Ok(Self::new(conversation, invitation.secret(), address));
                }
                Err(error) => error,
            };
            if Instant::now() + RETRY_PAUSE < deadline {
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
            return Err(Error::new(
                Code::Timeout,
                format!(
                    "no process answers at {}, or it does not take this one in: has it closed or died, is that its \
                     address as seen from here, and does no firewall stand between? ({})",
                    invitation.address, error.message
                ),
            ));
        }
    }
}

impl Talk {
    /// Takes what the other side has set, until `key` is there or the deadline has passed.
    fn look(&mut self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(value) = self.values.get(key) {
                return Ok(Some(value.clone()));
            }
            let Some(message) = self.conversation.receive(deadline)? else {
                return Ok(None);
            };
            let (key, value) = read(&message)
                .filter(|_| self.left > 0)
                .ok_or_else(|| Error::new(Code::Untrusted, "a guest says what none would say"))?;
            self.left -= 1;
            // A key is set once.
            let value = || value.to_vec();
            self.values.entry(key.to_owned()).or_insert_with(value);
        }
    }
}

/// `key` set to `value`, as one side tells the other.
pub(crate) fn write(key: &str, value: &[u8]) -> Vec<u8> {
    let mut message = (key.len() as u16).to_le_bytes().to_vec();
    message.extend(key.as_bytes());
    message.extend(value);
    message
}

/// Such a message as the key and the value.
pub(crate) fn read(message: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = message.split_first_chunk()?;
    let (key, value) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    Some((std::str::from_utf8(key).ok()?, value))
}

impl Store for Pair {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        let mut talk = self.talk.lock();
        talk.values.insert(key.to_owned(), value.to_vec());
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        talk.conversation.send(&write(key, value), deadline)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Instant::now() + timeout.min(Duration::from_secs(365 * 86_400));
        let found = self.talk.lock().look(key, deadline)?;
        found.ok_or_else(|| not_set(key, timeout))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.talk.lock().look(key, Instant::now())
    }

    fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    fn secret(&self) -> Option<Secret> {
        Some(self.secret.clone())
    }

    fn is_for_strangers(&self) -> bool {
        true
    }

    /// The host serves it for all guests, one after another.
    fn ends_with_rank_0(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::{Receiver, unbounded};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn config() -> Config {
        let mut config = Config::default();
        config.set("interface", "lo").expect("a setting");
        config
    }

    fn host() -> (Host, Receiver<Pair>) {
        let (guests, arrivals) = unbounded();
        let receive = move |pair| guests.send(pair).expect("the test listens");
        let host = Host::open(&config(), [7; 16], receive).expect("a host");
        (host, arrivals)
    }

    fn given(host: &Host) -> Invitation {
        Invitation::from_bytes(&host.invitation().to_bytes()).expect("as it was given away")
    }

    #[test]
    fn every_guest_has_a_conversation_of_its_own() {
        let (host, arrivals) = host();
        let invitation = given(&host);
        assert_eq!(invitation.card(), [7; 16]);
        let [one, two] = [1, 2].map(|_| Pair::visit(&invitation, &config(), SOON).expect("let in"));
        let [first, second] = [0, 1].map(|_| arrivals.recv_timeout(SOON).expect("a guest"));
        assert!(one.secret() == first.secret() && one.is_for_strangers());
        one.set("key", b"one").expect("set");
        two.set("key", b"two").expect("set");
        let seen = [&first, &second].map(|pair| pair.wait("key", SOON).expect("its own"));
        assert!(
            seen == [b"one", b"two"] || seen == [b"two", b"one"],
            "{seen:?}"
        );
        assert_eq!(one.get("other").expect("no failure"), None);
        let (of_one, _) = if seen[0] == b"one" {
            (&first, &second)
        } else {
            (&second, &first)
        };
        of_one.set("other", b"for one alone").expect("set");
        assert_eq!(one.wait("other", SOON).expect("set"), b"for one alone");
        let late = Duration::from_millis(50);
        assert_eq!(two.wait("other", late).unwrap_err().code, Code::Timeout);
        host.close();
        for pair in [first, second] {
            let error = pair.wait("never", SOON).unwrap_err();
            assert!(
                [Code::Aborted, Code::System].contains(&error.code),
                "{error}"
            );
        }
    }

    /// A guest holds all that its invitation has, and can be nobody but a guest by it.
    #[test]
    fn a_guest_cannot_pose_as_the_host() {
        let (host, _arrivals) = host();
        let invitation = given(&host);
        // Another host, with the same key pair of guests, at the address that a third process is led to.
        let (guests, arrivals) = unbounded::<Pair>();
        let receive = move |pair| guests.send(pair).expect("the test listens");
        let liar = Host::open(&config(), [7; 16], receive).expect("a host");
        let key = invitation.key(&invitation.guest);
        let door = Door {
            secret: invitation.secret(),
            is_closed: Arc::default(),
            receive: |_| panic!("a guest was taken in by a liar"),
        };
        // It answers for the group of the conversation with the key that it has, that of guests.
        liar.seat.unregister(&host.key.id(), HOST);
        let apart = EndpointOptions {
            host: Some("liar".into()),
            ..options(&config(), None)
        };
        let elsewhere = Endpoint::global(&apart).expect("an endpoint");
        elsewhere
            .register(key, HOST, 2, Arc::new(door))
            .expect("registered");
        let led_astray = Invitation {
            address: elsewhere.address().clone(),
            ..invitation
        };
        let patience = Duration::from_millis(300);
        let error = Pair::visit(&led_astray, &config(), patience).err().unwrap();
        assert_eq!(error.code, Code::Timeout, "{error}");
        assert!(arrivals.is_empty());
    }

    #[test]
    fn a_host_that_has_gone_is_named() {
        let (host, _arrivals) = host();
        let invitation = given(&host);
        let address = invitation.address.to_string();
        drop(host);
        let error = Pair::visit(&invitation, &config(), Duration::from_millis(200));
        let error = error.err().unwrap();
        assert_eq!(error.code, Code::Timeout);
        assert!(error.message.contains(&address), "{error}");
    }

    #[test]
    fn what_is_no_invitation_is_refused() {
        let (host, _arrivals) = host();
        let good = host.invitation().to_bytes();
        for at in (0..good.len()).step_by(7) {
            let mut damaged = good.clone();
            damaged[at] ^= 1;
            assert!(Invitation::from_bytes(&damaged).is_err(), "byte {at}");
        }
        assert!(Invitation::from_bytes(&good[..good.len() - 1]).is_err());
        assert!(Invitation::from_bytes(&[]).is_err());
    }
}
