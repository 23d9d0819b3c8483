//! The C ABI: the header beside the Rust that stands behind it, both ways, and beside what was released.
//!
//! The prototypes that cbindgen makes of the Rust functions are compiled after the header, so that a difference is a
//! compiler's error; the numbers, the constants and the layout of structs that Rust has are asserted in C. Both sides
//! must have the same items. Then all of it is compared, as text, with `tests/c/abi/`, one file for each minor version:
//! the current one must be the same to the letter (`UNISONO_TEST_BLESS=1` writes it, once the minor version is released
//! only with more than there was), of the others nothing may be gone. docs/versioning.md says what that promises.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use unisono::error::Code;
use unisono::types::{DataType, ReduceOp};
use unisono_capi::communicator::{NO_COLOR, UniqueId};
use unisono_capi::config::Setting;
use unisono_capi::error::ErrorInfo;
use unisono_capi::messages::ANY_SOURCE;
use unisono_capi::sized::Growing;
use unisono_capi::store::{NOT_SET, StoreFunctions};
use unisono_capi::types::{DEFAULT_STREAM, FOREVER, Options};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compiles `source` against the header, with every warning an error; with `preprocess` returns what the preprocessor
/// makes of it instead.
fn compile(name: &str, source: &str, preprocess: bool) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("{name}.c"));
    fs::write(&path, source).expect("write the source");
    let mut command = Command::new(env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror"]);
    command.args(match preprocess {
        true => ["-E", "-P"],
        false => ["-fsyntax-only", "-O0"],
    });
    let command = command.arg("-I").arg(root().join("include")).arg(&path);
    let done = command.output().expect("a C compiler");
    let complaints = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{}:\n{complaints}", path.display());
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// The declarations of the header, each with single spaces: without comments, macros and included headers. Preprocessed
/// once, for all tests.
fn declarations() -> &'static [String] {
    static DECLARATIONS: LazyLock<Vec<String>> = LazyLock::new(preprocessed);
    &DECLARATIONS
}

fn preprocessed() -> Vec<String> {
    let mark = "int the_header_begins_here;";
    let source =
        format!("#include <stddef.h>\n#include <stdint.h>\n{mark}\n#include <unisono.h>\n");
    let text = compile("declarations", &source, true);
    let (_, header) = text.split_once(mark).expect("the mark");
    let mut all = Vec::new();
    let (mut depth, mut one) = (0, String::new());
    for word in header.split_whitespace() {
        depth += word.matches('{').count() as i32 - word.matches('}').count() as i32;
        let _ = write!(one, "{}{word}", if one.is_empty() { "" } else { " " });
        if depth == 0 && word.ends_with(';') {
            all.push(std::mem::take(&mut one).trim_end_matches(';').to_owned());
        }
    }
    assert!(all.len() > 60 && one.is_empty(), "{all:?} {one}");
    all
}

/// The name of the function that a declaration declares.
fn function_of(declaration: &str) -> Option<&str> {
    if declaration.starts_with("typedef") {
        return None;
    }
    let (before, _) = declaration.split_once('(')?;
    before.rsplit([' ', '*']).next()
}

/// The prototypes that the Rust functions have.
fn generated() -> String {
    let renamed = [
        ("Status", "unisono_status"),
        ("ErrorInfo", "unisono_error"),
        ("Settings", "unisono_config"),
        ("Setting", "unisono_setting"),
        ("LevelNumber", "unisono_log_level"),
        ("LogFunction", "unisono_log_function"),
        ("Communicator", "unisono_communicator"),
        ("Candidate", "unisono_candidate"),
        ("Window", "unisono_window"),
        ("Work", "unisono_work"),
        ("UniqueId", "unisono_unique_id"),
        ("StoreFunctions", "unisono_store"),
        ("DType", "unisono_dtype"),
        ("Op", "unisono_op"),
        ("Options", "unisono_options"),
    ];
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        usize_is_size_t: true,
        no_includes: true,
        ..cbindgen::Config::default()
    };
    config.export.item_types = vec![cbindgen::ItemType::Functions];
    config.export.rename = renamed
        .map(|(rust, c)| (rust.to_owned(), c.to_owned()))
        .into();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for entry in fs::read_dir(root().join("rust/capi/src")).expect("the sources") {
        let path = entry.expect("a source").path();
        // A folder holds the tests of a module; no function is exported there.
        if path.is_file() {
            builder = builder.with_src(path);
        }
    }
    let mut text = Vec::new();
    builder.generate().expect("bindings").write(&mut text);
    String::from_utf8(text).expect("text")
}

/// Name and number of every constant of an enumeration.
fn rust_values() -> BTreeMap<String, u32> {
    let mut all = BTreeMap::from([("UNISONO_OK".to_owned(), 0)]);
    for code in Code::ALL {
        all.insert(format!("UNISONO_{}", upper(code.name())), code as u32);
    }
    for dtype in DataType::ALL {
        all.insert(
            format!("UNISONO_{}", dtype.name().to_uppercase()),
            dtype as u32,
        );
    }
    for op in ReduceOp::ALL {
        all.insert(
            format!("UNISONO_{}", op.name().to_uppercase()),
            u32::from(op.number()),
        );
    }
    for (number, level) in ["OFF", "ERROR", "WARN", "INFO", "DEBUG"].iter().enumerate() {
        all.insert(format!("UNISONO_LOG_{level}"), number as u32);
    }
    all
}

/// `PEER_LOST` for `PeerLost`.
fn upper(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_uppercase());
    }
    text
}

fn header_values(declarations: &[String]) -> BTreeMap<String, u32> {
    let enums = declarations
        .iter()
        .filter(|one| one.starts_with("typedef enum"));
    let mut all = BTreeMap::new();
    for one in enums {
        let inside = &one[one.find('{').expect("a body") + 1..one.rfind('}').expect("a body")];
        for constant in inside.split(',') {
            let (name, number) = constant.split_once('=').expect("an explicit number");
            let number = number.trim().parse().expect("a number");
            let twice = all.insert(name.trim().to_owned(), number);
            assert_eq!(twice, None, "{name} twice");
        }
    }
    all
}

/// A struct as Rust has it: its size, and each field with its offset and size.
type Layout = (usize, Vec<(&'static str, usize, usize)>);

fn field_size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($type:ty: $($field:ident),+) => {
        (size_of::<$type>(), vec![$((
            stringify!($field),
            offset_of!($type, $field),
            field_size(|all: &$type| &all.$field),
        )),+])
    };
}

fn rust_structs() -> BTreeMap<&'static str, Layout> {
    BTreeMap::from([
        (
            "unisono_error",
            layout!(ErrorInfo: size, status, fatal, peer, reserved, message, operation),
        ),
        (
            "unisono_setting",
            layout!(Setting: size, name, variable, accepts, initial, consequence, must_agree, reserved),
        ),
        ("unisono_unique_id", layout!(UniqueId: bytes)),
        (
            "unisono_store",
            layout!(StoreFunctions: size, context, set, get, wait),
        ),
        (
            "unisono_options",
            layout!(Options: size, stream, timeout, factor, received),
        ),
    ])
}

/// The fields of every struct of the header that is not opaque, as they are declared.
fn header_fields(declarations: &[String]) -> BTreeMap<&str, Vec<&str>> {
    let with_body = |one: &&String| one.starts_with("typedef struct") && one.contains('{');
    let structs = declarations.iter().filter(with_body);
    structs
        .map(|one| {
            let (open, close) = (
                one.find('{').expect("a body"),
                one.rfind('}').expect("a body"),
            );
            let fields = one[open + 1..close].split(';').map(str::trim);
            let fields = fields.filter(|field| !field.is_empty());
            (one[close + 1..].trim(), fields.collect())
        })
        .collect()
}

/// The name that `int32_t peer`, `uint8_t bytes[128]` or `int (*set)(int)` declares.
fn name_of(field: &str) -> &str {
    if let Some((_, function)) = field.split_once("(*") {
        return function.split(')').next().expect("a name");
    }
    let name = field.split('[').next().expect("a name").trim_end();
    name.rsplit([' ', '*']).next().expect("a name")
}

#[test]
fn functions_are_those_of_the_header() {
    let declarations = declarations();
    let generated = generated();
    let of_header: BTreeSet<&str> = declarations.iter().filter_map(|d| function_of(d)).collect();
    let flat = generated.split_whitespace().collect::<Vec<_>>().join(" ");
    let of_rust: BTreeSet<&str> = flat.split(';').filter_map(function_of).collect();
    assert_eq!(
        of_header, of_rust,
        "functions of the header, functions in Rust"
    );
    assert!(of_header.iter().all(|name| name.starts_with("unisono_")));
    compile(
        "functions",
        &format!("#include <unisono.h>\n{generated}"),
        false,
    );
}

#[test]
fn numbers_are_those_of_the_header() {
    assert_eq!(header_values(declarations()), rust_values());
    let version: Vec<&str> = env!("CARGO_PKG_VERSION").split('.').collect();
    let mut source = String::from("#include <unisono.h>\n");
    for (name, number) in ["MAJOR", "MINOR", "PATCH"].iter().zip(version) {
        let _ = writeln!(
            source,
            "_Static_assert(UNISONO_VERSION_{name} == {number}, \"{name}\");"
        );
    }
    let version = unisono_capi::version::unisono_version();
    let _ = writeln!(
        source,
        "_Static_assert(UNISONO_VERSION == {version}, \"version\");"
    );
    let _ = writeln!(
        source,
        "_Static_assert(UNISONO_NOT_SET == {NOT_SET}U, \"not set\");"
    );
    let _ = writeln!(
        source,
        "_Static_assert(UNISONO_ANY_SOURCE == {ANY_SOURCE}, \"any source\");"
    );
    let _ = writeln!(
        source,
        "_Static_assert(UNISONO_FOREVER == {FOREVER:?}, \"forever\");"
    );
    let _ = writeln!(
        source,
        "_Static_assert((size_t)UNISONO_DEFAULT_STREAM == {DEFAULT_STREAM}, \"default stream\");"
    );
    let below = NO_COLOR + 1;
    let _ = writeln!(
        source,
        "_Static_assert(UNISONO_NO_COLOR == {below} - 1, \"no color\");"
    );
    compile("numbers", &source, false);
}

#[test]
fn structs_are_those_of_the_header() {
    let declarations = declarations();
    let of_rust = rust_structs();
    let names = |layout: &Layout| layout.1.iter().map(|(name, ..)| *name).collect::<Vec<_>>();
    let fields: BTreeMap<&str, Vec<&str>> = of_rust
        .iter()
        .map(|(name, layout)| (*name, names(layout)))
        .collect();
    let of_header: BTreeMap<&str, Vec<&str>> = header_fields(declarations)
        .into_iter()
        .map(|(name, fields)| (name, fields.into_iter().map(name_of).collect()))
        .collect();
    assert_eq!(of_header, fields);
    let mut source = String::from("#include <unisono.h>\n");
    for (name, (size, fields)) in &of_rust {
        let _ = writeln!(
            source,
            "_Static_assert(sizeof({name}) == {size}, \"{name}\");"
        );
        for (field, offset, size) in fields {
            let _ = writeln!(
                source,
                "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n\
                 _Static_assert(sizeof((({name}*)0)->{field}) == {size}, \"{name}.{field}\");"
            );
        }
    }
    compile("structs", &source, false);
}

/// The whole ABI, one fact a line.
fn abi() -> BTreeSet<String> {
    let declarations = declarations();
    let mut facts: BTreeSet<String> = declarations
        .iter()
        .filter(|one| !one.contains('{'))
        .map(|one| one.replace("( ", "(").replace(" )", ")"))
        .collect();
    for (name, number) in rust_values() {
        facts.insert(format!("{name} = {number}"));
    }
    for (name, (size, fields)) in rust_structs() {
        facts.insert(format!("sizeof {name} = {size}"));
        for (field, offset, _) in fields {
            facts.insert(format!("offsetof {name}.{field} = {offset}"));
        }
    }
    for (name, fields) in header_fields(declarations) {
        facts.extend(fields.iter().map(|field| format!("field {name}: {field}")));
    }
    facts
}

#[test]
fn nothing_that_was_released_is_gone() {
    let current = abi();
    let version = env!("CARGO_PKG_VERSION")
        .rsplit_once('.')
        .expect("a version")
        .0;
    let changelog = fs::read_to_string(root().join("CHANGELOG.md")).expect("the changelog");
    let is_released = changelog.contains(&format!("\n## [{version}."));
    let folder = root().join("tests/c/abi");
    let own = folder.join(format!("{version}.txt"));
    let recorded = fs::read_to_string(&own).unwrap_or_default();
    let recorded: BTreeSet<String> = recorded.lines().map(str::to_owned).collect();
    let gone: Vec<_> = recorded.difference(&current).collect();
    let new: Vec<_> = current.difference(&recorded).collect();
    if env::var_os("UNISONO_TEST_BLESS").is_some() && (gone.is_empty() || !is_released) {
        let text: String = current.iter().map(|fact| format!("{fact}\n")).collect();
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(&own, &text).expect("write");
    } else {
        let what_to_do = if is_released {
            "Restore what is gone, or raise the minor version in Cargo.toml: programs use it"
        } else {
            "What is gone may go until the version is released"
        };
        assert!(
            gone.is_empty() && new.is_empty(),
            "the ABI is not that of {}: gone {gone:#?}, new {new:#?}. {what_to_do}. If what is new is meant, \
             UNISONO_TEST_BLESS=1 records it.",
            own.display()
        );
    }
    for entry in fs::read_dir(&folder).expect("the records") {
        let path = entry.expect("a record").path();
        let before = fs::read_to_string(&path).expect("a record");
        for fact in before.lines() {
            // A struct with a size of its own may become longer.
            let may_grow =
                fact.starts_with("sizeof") && fact.split(' ').nth(1).is_some_and(has_size);
            assert!(
                may_grow || current.contains(fact),
                "{}: no longer so: {fact}",
                path.display()
            );
        }
    }
}

#[test]
fn callers_of_the_first_version_are_accepted() {
    let first = BTreeMap::from([
        ("unisono_error", ErrorInfo::FIRST_SIZE),
        ("unisono_setting", Setting::FIRST_SIZE),
        ("unisono_store", StoreFunctions::FIRST_SIZE),
        ("unisono_options", Options::FIRST_SIZE),
    ]);
    let mut recorded: BTreeMap<String, usize> = BTreeMap::new();
    for entry in fs::read_dir(root().join("tests/c/abi")).expect("the records") {
        let text = fs::read_to_string(entry.expect("a record").path()).expect("a record");
        for fact in text.lines().filter(|fact| fact.starts_with("sizeof ")) {
            let (name, size) = fact["sizeof ".len()..].split_once(" = ").expect("a size");
            if has_size(name) {
                let size = size.parse().expect("a number");
                let least = recorded.entry(name.to_owned()).or_insert(size);
                *least = size.min(*least);
            }
        }
    }
    let first = first
        .into_iter()
        .map(|(name, size)| (name.to_owned(), size));
    assert_eq!(recorded, first.collect());
}

fn has_size(name: &str) -> bool {
    rust_structs()
        .get(name)
        .is_some_and(|(_, fields)| fields[0].0 == "size")
}
