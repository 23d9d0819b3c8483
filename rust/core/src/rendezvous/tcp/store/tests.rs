//! The TCP store over real sockets: what members can do, and what strangers cannot.

use std::io::{BufRead, BufReader};
use std::net::{Shutdown, TcpListener};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use proptest::prelude::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::rendezvous::store::{MAX_VALUE, suite};
use crate::skips::skipped;

const SOON: Duration = Duration::from_secs(20);

fn serve() -> TcpStoreServer {
    TcpStoreServer::start("127.0.0.1:0").expect("a free port")
}

/// The key of [`serve`].
fn usual_key() -> StoreKey {
    StoreKey::new("", None)
}

fn secret_key(secret: &str) -> StoreKey {
    StoreKey::new("own", Some(Secret::from_bytes(secret.as_bytes())))
}

#[test]
fn passes_the_suite() {
    let server = serve();
    let address = server.own_address().to_string();
    suite::run(|| TcpStore::connect(&address, SOON).expect("connect"));
}

/// The rank that serves chooses its own addresses by the way to the server. Where that is at all addresses, loopback leads to
/// it, and the others are elsewhere.
#[test]
fn a_server_at_all_addresses_tells_no_way_to_it() {
    let address = |server| Store::address(&TcpStore::own(server).expect("its own client"));
    assert!(address(serve()).is_some_and(|address| address.ip().is_loopback()));
    // For documentation, so of no host; as the address of a service is that others reach a host by.
    let elsewhere = TcpStoreServer::start("192.0.2.1:0").expect("serve");
    assert_eq!(address(elsewhere), None);
}

#[test]
fn a_client_waits_for_its_server() {
    let port = serve().own_address().port();
    let address = format!("127.0.0.1:{port}");
    thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect(&address, SOON).expect("comes up"));
        thread::sleep(Duration::from_millis(80));
        let own = TcpStore::own(TcpStoreServer::start(&address).expect("bind")).expect("own");
        own.set("key", b"value").expect("set");
        let client = client.join().expect("no panic");
        assert_eq!(client.wait("key", SOON).expect("wait"), b"value");
        drop(own);
        let error = client.get("key").expect_err("the server is gone");
        assert_eq!((error.code, error.peer), (Code::System, Some(0)));
    });
}

#[test]
fn a_port_where_nothing_listens_is_a_timeout_that_says_so() {
    let port = serve().own_address().port();
    let error = TcpStore::connect(&format!("127.0.0.1:{port}"), Duration::from_millis(50))
        .expect_err("nothing listens");
    assert_eq!(error.code, Code::Timeout);
    assert!(error.message.contains("rank 0 has not come"), "{error}");
}

/// The error of a client that finds the servers of other jobs alone. The time is longer than one of them takes to answer, which
/// is long on a busy machine.
fn meet_in_vain(ports: &[u16], key: &StoreKey) -> Error {
    let mut time = Duration::from_millis(50);
    loop {
        let error = TcpStore::connect_any("127.0.0.1", ports, key, time).expect_err("another job");
        if error.message.contains("another secret") || time > SOON {
            return error;
        }
        time *= 4;
    }
}

#[test]
fn the_server_of_another_job_is_passed_over() {
    let start = |key| TcpStoreServer::start_any("127.0.0.1", &[0], key).expect("bind");
    let keys = [
        StoreKey::new("other", None),
        secret_key("another secret"),
        secret_key("the secret"),
    ];
    let servers = keys.each_ref().map(start);
    let ports = servers.each_ref().map(|server| server.own_address().port());
    let store = TcpStore::connect_any("127.0.0.1", &ports, &keys[2], SOON).expect("the last");
    assert_eq!(store.address().port(), ports[2]);
    assert_eq!(store.secret(), Some(Secret::from_bytes(b"the secret")));
    let error = meet_in_vain(&ports[..2], &keys[2]);
    assert!(error.message.contains("another secret"), "{error}");
    // It is said also of a store that is gone by then.
    drop(servers);
    let start = |key| TcpStoreServer::start_any("127.0.0.1", &[0], key).expect("bind");
    let other = start(&keys[0]);
    let port = other.own_address().port();
    let client = thread::spawn(move || {
        let time = Duration::from_secs(2);
        TcpStore::connect_any("127.0.0.1", &[port], &secret_key("the secret"), time)
    });
    thread::sleep(Duration::from_secs(1));
    drop(other);
    let error = client.join().expect("no panic").expect_err("another job");
    assert!(error.message.contains("another secret"), "{error}");
    // A taken port is passed over by the server, too.
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let ports = [taken.local_addr().expect("address").port(), 0];
    let third = TcpStoreServer::start_any("127.0.0.1", &ports, &keys[2]).expect("the second");
    assert_ne!(third.own_address().port(), ports[0]);
}

#[test]
fn addresses_are_split() {
    assert_eq!(
        split_address("node0:29500").expect("valid"),
        ("node0", 29500)
    );
    assert_eq!(split_address("[fd00::7]:1").expect("valid"), ("fd00::7", 1));
    for wrong in [
        "",
        "node0",
        "node0:",
        ":1",
        "node0:70000",
        "fd00::7:1",
        "[fd00::7:1",
        "a/b:1",
    ] {
        assert!(split_address(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_client_whose_connection_was_closed_comes_again() {
    let server = serve();
    let store = TcpStore::connect(&server.own_address().to_string(), SOON).expect("connect");
    for round in 0..3 {
        for line in store.idle.lock().iter() {
            line.stream.shutdown(Shutdown::Both).expect("a connection");
        }
        let key = round.to_string();
        store.set(&key, b"value").expect("set");
        for line in store.idle.lock().iter() {
            line.stream.shutdown(Shutdown::Both).expect("a connection");
        }
        assert_eq!(store.wait(&key, SOON).expect("wait"), b"value");
    }
}

/// A firewall forgets the connection: nothing comes back over it, and nothing says so.
#[test]
fn a_client_whose_connection_hears_nothing_comes_again() {
    let server = serve();
    let store = TcpStore::connect(&server.own_address().to_string(), SOON).expect("connect");
    let deafen = || {
        for line in store.idle.lock().iter() {
            let takes_nothing = socket2::SockFilter::new(0x06, 0, 0, 0);
            let socket = SockRef::from(&line.stream);
            socket.attach_filter(&[takes_nothing]).expect("a filter");
        }
    };
    let begun = Instant::now();
    deafen();
    store.set("key", b"value").expect("set");
    deafen();
    assert_eq!(store.wait("key", SOON).expect("wait"), b"value");
    assert!(begun.elapsed() < LATEST_REPLY, "{:?}", begun.elapsed());
}

/// The server's answer to `bytes`, until it closes the connection.
fn answer_to(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(SOON)).expect("timeout");
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        // The server had not read everything.
        Err(cause) => assert_eq!(cause.kind(), ErrorKind::ConnectionReset),
    }
    answer
}

#[test]
fn a_stranger_gets_the_same_refusal_whatever_is_wrong() {
    let server = TcpStoreServer::start_any("127.0.0.1", &[0], &secret_key("right")).expect("bind");
    let address = server.own_address();
    let hello = |key: &StoreKey| Greeting::new(key).expect("a hello").1.to_vec();
    let mut other_version = hello(&secret_key("right"));
    other_version[7] += 1;
    let mut damaged = hello(&secret_key("right"));
    damaged[20] ^= 1;
    let mut no_magic = [0x5a; HELLO];
    no_magic[..4].copy_from_slice(&MAGIC[..4]);
    for (what, bytes) in [
        ("another secret", hello(&secret_key("wrong"))),
        ("no secret", hello(&StoreKey::new("own", None))),
        (
            "another job",
            hello(&StoreKey::new("other", Some(Secret::from_bytes(b"right")))),
        ),
        ("another version", other_version),
        ("a damaged one", damaged),
        ("something else", no_magic.to_vec()),
        ("a web browser", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("the version before", [&b"unisono1"[..], &[7; 32]].concat()),
    ] {
        assert_eq!(answer_to(address, &bytes), REFUSAL, "{what}");
    }
    // A client that replays the hello of a member gets an answer, but no access.
    let recorded = hello(&secret_key("right"));
    let request = [&recorded[..], &[16, 0], &[0; 16]].concat();
    assert_eq!(answer_to(address, &request).len(), HELLO);
    let member = TcpStore::own(server).expect("a member");
    member.set("key", b"value").expect("set");
}

#[test]
fn a_member_that_breaks_the_protocol_loses_its_connection() {
    let server = serve();
    let address = server.own_address();
    let store = TcpStore::connect(&address.to_string(), SOON).expect("connect");
    let request = |operation: u8, key: u16, value: u32| {
        let mut bytes = vec![operation, 0];
        bytes.extend(key.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        bytes.extend(u64::MAX.to_le_bytes());
        bytes
    };
    let mut twice = Request::Wait("k", SOON).write();
    twice.extend(Request::Get("k").write());
    let mut latin = request(1, 2, 0);
    latin.extend([0xff, 0xfe]);
    for hostile in [
        request(9, 0, 0),
        request(1, u16::MAX, 0),
        request(1, 1, u32::MAX),
        request(2, 1, 1),
        twice,
        latin,
    ] {
        let mut line = try_address(address, &usual_key(), SOON).expect("connect");
        let mut frames = Vec::new();
        line.channel.seal(&hostile, &mut frames);
        assert_closed_after(&mut line.stream, &frames);
    }
    let mut line = try_address(address, &usual_key(), SOON).expect("connect");
    let mut frames = Vec::new();
    line.channel.seal(&Request::Get("k").write(), &mut frames);
    frames[10] ^= 1;
    assert_closed_after(&mut line.stream, &frames);
    let mut line = try_address(address, &usual_key(), SOON).expect("connect");
    let mut nothing = Vec::new();
    (0..1000).for_each(|_| line.channel.seal(&[], &mut nothing));
    assert_closed_after(&mut line.stream, &nothing);
    for head in [0_u16, 15, u16::MAX] {
        let mut line = try_address(address, &usual_key(), SOON).expect("connect");
        assert_closed_after(&mut line.stream, &head.to_le_bytes());
    }
    store.set("key", b"still there").expect("set");
    assert_eq!(store.wait("key", SOON).expect("wait"), b"still there");
}

/// A server that sends a byte now and then is waited for as long as one that sends none.
#[test]
fn a_server_that_never_comes_to_an_end_is_not_waited_for_for_long() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accept");
            for byte in MAGIC.iter().chain(&[0; HELLO]) {
                thread::sleep(Duration::from_millis(250));
                if stream.write_all(&[*byte]).is_err() {
                    break;
                }
            }
        });
        let begun = Instant::now();
        let cause =
            try_address(address, &usual_key(), Duration::from_millis(300)).expect_err("slow");
        assert_eq!(cause.kind(), ErrorKind::TimedOut, "{cause}");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
    });
    let server = serve();
    let mut line = try_address(server.own_address(), &usual_key(), SOON).expect("connect");
    let request = Request::Wait("no such key", SOON);
    let late = line
        .exchange(&request, Duration::from_millis(50))
        .expect_err("late");
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
}

/// As one that is stopped: its connections stay open.
#[test]
fn a_server_that_no_longer_answers_is_waited_for_until_the_meeting_is_over() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    let short = Duration::from_millis(300);
    let begun = Instant::now();
    let error = TcpStore::connect(&address, short).expect_err("it says nothing");
    assert_eq!(error.code, Code::Timeout, "{error}");
    let server = serve();
    let store = TcpStore::connect(&server.own_address().to_string(), SOON).expect("connect");
    let store = TcpStore {
        // Where a line that is opened anew leads.
        address: listener.local_addr().expect("address"),
        ..store.until(Instant::now().checked_add(short))
    };
    store.idle.lock().clear();
    for late in [
        store.get("key").map(drop),
        store.set("key", b"value"),
        store.wait("key", SOON).map(drop),
    ] {
        let error = late.expect_err("no answer");
        assert_eq!((error.code, error.peer), (Code::System, Some(0)), "{error}");
    }
    assert!(begun.elapsed() < LATEST_REPLY, "{:?}", begun.elapsed());
}

fn assert_closed_after(stream: &mut TcpStream, bytes: &[u8]) {
    stream.set_read_timeout(Some(SOON)).expect("timeout");
    let _ = stream.write_all(bytes);
    match stream.read(&mut [0; 1]) {
        Ok(count) => assert_eq!(count, 0),
        Err(cause) => assert_eq!(cause.kind(), ErrorKind::ConnectionReset),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_bytes_leave_the_server_alive(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        has_shaken_hands in any::<bool>(),
    ) {
        let server = serve();
        let address = server.own_address();
        let mut stream = if has_shaken_hands {
            try_address(address, &usual_key(), SOON).expect("connect").stream
        } else {
            TcpStream::connect(address).expect("connect")
        };
        let _ = stream.write_all(&bytes);
        drop(stream);
        let store = TcpStore::own(server).expect("alive");
        store.set("key", b"value").expect("set");
        prop_assert_eq!(store.get("key").expect("get"), Some(b"value".to_vec()));
    }
}

/// A server in a process of its own with a limit of descriptors.
struct Apart {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
}

const DESCRIPTORS: &str = "UNISONO_TEST_DESCRIPTORS";

impl Apart {
    fn new(descriptors: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "--ignored", "--nocapture"])
            .arg("rendezvous::tcp::store::tests::serves_apart")
            .env(DESCRIPTORS, descriptors.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut apart = Self {
            child,
            input,
            output,
            address: ([127, 0, 0, 1], 0).into(),
        };
        apart.address = apart.said("serves at ").parse().expect("an address");
        apart
    }

    /// The rest of the next line that has `begin` in it.
    fn said(&mut self, begin: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).expect("a line") > 0 {
            if let Some((_, rest)) = line.split_once(begin) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the process ended without saying {begin:?}");
    }

    /// Whether the process can open `count` files at once.
    fn can_open(&mut self, count: usize) -> String {
        writeln!(self.input, "{count}").expect("alive");
        self.said("opened ")
    }

    fn client(&self) -> TcpStore {
        TcpStore::connect(&self.address.to_string(), SOON).expect("let in")
    }

    /// MiB that the process has in memory.
    fn resident(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("alive");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let words = line.and_then(|line| line.split_whitespace().nth(1));
        words
            .and_then(|kib| kib.parse::<usize>().ok())
            .expect("a number")
            >> 10
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "no test by itself: the process that other tests of this module start and flood"]
fn serves_apart() {
    let Ok(descriptors) = std::env::var(DESCRIPTORS) else {
        return;
    };
    let current = descriptors.parse().ok();
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("fewer descriptors");
    let server = serve();
    println!("\nserves at {}", server.own_address());
    for line in std::io::stdin().lines() {
        let count: usize = line.expect("a line").parse().expect("a number");
        let files: io::Result<Vec<_>> = (0..count)
            .map(|_| std::fs::File::open("/dev/null"))
            .collect();
        match files {
            Ok(files) => println!("\nopened {}", files.len()),
            Err(cause) => println!("\nopened not all: {cause}"),
        }
    }
}

/// Lets this process have as many descriptors as `connections` to a flood and more.
fn may_flood(connections: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    let wanted = connections + 500;
    if limit.current.is_none_or(|current| current >= wanted) {
        return true;
    }
    let raised = Rlimit {
        current: Some(wanted),
        ..limit
    };
    if let Err(cause) = setrlimit(Resource::Nofile, raised) {
        skipped(format_args!(
            "this process may not have {wanted} descriptors: {cause}"
        ));
        return false;
    }
    true
}

/// `count` clients that come at once each set a value and read it.
fn all_get_in(apart: &Apart, count: usize) {
    thread::scope(|scope| {
        for client in 0..count {
            scope.spawn(move || {
                let store = apart.client();
                let key = format!("client/{client}");
                store.set(&key, b"value").expect("set");
                assert_eq!(
                    store.get(&key).expect("get").as_deref(),
                    Some(&b"value"[..])
                );
            });
        }
    });
}

#[test]
fn silent_connections_take_neither_the_descriptors_nor_the_way_in() {
    if !may_flood(1100) {
        return;
    }
    let mut apart = Apart::new(1024);
    let early = apart.client();
    early.set("early", b"value").expect("set");
    let flood: Vec<_> = (0..1100)
        .map(|_| TcpStream::connect(apart.address).expect("connect"))
        .collect();
    assert_eq!(apart.can_open(400), "400");
    all_get_in(&apart, 70);
    assert_eq!(apart.can_open(400), "400");
    // Clients that were connected before have noticed nothing.
    assert_eq!(
        early.get("early").expect("get").as_deref(),
        Some(&b"value"[..])
    );
    drop(flood);
}

/// Asks for `key`, `times` times, and reads nothing.
fn ask(line: &mut Line, key: &str, times: usize) {
    for _ in 0..times {
        let mut frames = Vec::new();
        line.channel.seal(&Request::Get(key).write(), &mut frames);
        // The server may have closed it.
        let _ = line.stream.write_all(&frames);
    }
}

#[test]
fn unread_replies_take_no_memory() {
    if !may_flood(600) {
        return;
    }
    let mut apart = Apart::new(2048);
    let open = || try_address(apart.address, &usual_key(), SOON).expect("let in");
    let honest = apart.client();
    honest.set("large", &vec![7; MAX_VALUE]).expect("set");
    let before = apart.resident();
    let mut flood: Vec<_> = (0..60).map(|_| open()).collect();
    for _ in 0..10 {
        for line in &mut flood {
            ask(line, "large", 1);
        }
        // The server has looked at what has come when it has answered this.
        let value = honest.get("large").expect("get");
        assert_eq!(value.map(|value| value.len()), Some(MAX_VALUE));
    }
    let after = apart.resident();
    assert!(after < before + 60, "{before} MiB, then {after} MiB");
    // Replies that each keep a value alive, which has been replaced.
    for round in 0..400 {
        let mut line = open();
        ask(&mut line, "large", 1);
        flood.push(line);
        // Refused when it would be too much.
        let _ = honest.set("large", &vec![round as u8; MAX_VALUE]);
    }
    let after = apart.resident();
    assert!(after < before + 330, "{before} MiB, then {after} MiB");
    assert_eq!(apart.can_open(600), "600");
    all_get_in(&apart, 10);
}

#[test]
fn more_clients_than_connections_get_through() {
    // 32 connections.
    let apart = Apart::new(64);
    const CLIENTS: usize = 65;
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let apart = &apart;
            scope.spawn(move || {
                let store = apart.client();
                store.set(&format!("here/{client}"), b"").expect("set");
                assert_eq!(store.wait("go", 3 * SOON).expect("wait"), b"value");
            });
        }
        let store = apart.client();
        for client in 0..CLIENTS {
            store
                .wait(&format!("here/{client}"), 3 * SOON)
                .expect("came");
        }
        store.set("go", b"value").expect("set");
    });
}
