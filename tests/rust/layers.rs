//! The order of the code: no module uses one that stands after it in the list of `lib.rs`, and files that use each other
//! in a circle are few. A crate that the runtime is divided into is a module here.
//!
//! The sources are parsed. Code for `cfg(test)`, `cfg(fuzzing)` and `cfg(loom)` is left out: tests may look anywhere. A path
//! counts where its first segment is `crate`, `self`, `super`, a crate of ours or a module of the file, in a `use`, in code
//! and in the arguments of a macro; a name that a `mod.rs` re-exports counts for the file that has it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, Token, UseTree};

/// How many files a circle may have: what cannot be read without each other.
const LARGEST_CIRCLE: usize = 3;

/// The crates beside the runtime's: their names in paths, and their folders in `rust/`.
const CRATES: [(&str, &str); 2] = [("unisono_plan", "plan"), ("unisono_reduce", "reduce")];

/// The crates above the runtime: their folders in `rust/`.
const DOORS: [&str; 4] = ["capi", "launch", "python", "torch"];

/// A file that declares how two languages call each other: what it calls, and the types that its callers take from it.
const INTERFACE: &str = "bridge";

#[test]
fn a_module_uses_only_those_before_it() {
    let code = Code::read();
    let list = layers(&code.of(&[]).text, "//! - ");
    let place = |layer: &str| list.iter().position(|name| name == layer);
    for layer in code.layers() {
        assert!(
            place(layer).is_some(),
            "the list in lib.rs leaves out {layer}"
        );
    }
    assert_eq!(list.len(), code.layers().count(), "{list:?}");
    let mut up = Vec::new();
    for (from, to) in code.arrows() {
        // The crate's root names what the doors use.
        let (Some(user), Some(used)) = (from.first(), to.first()) else {
            continue;
        };
        if place(used) > place(user) {
            up.push(format!(
                "{} uses {}",
                code.of(from).path.display(),
                code.of(to).path.display()
            ));
        }
    }
    assert!(up.is_empty(), "imports run up the list:\n{}", up.join("\n"));
}

#[test]
fn contributing_has_the_same_list() {
    let code = Code::read();
    let text = fs::read_to_string(root().join("../CONTRIBUTING.md")).expect("a file");
    let numbered: Vec<_> = (1..)
        .map_while(|number| {
            let start = format!("\n{number}. `");
            text.find(&start)
                .map(|at| &text[at + start.len() - 1..])
                .map(names)
        })
        .flatten()
        .collect();
    assert_eq!(numbered, layers(&code.of(&[]).text, "//! - "));
}

#[test]
fn circles_of_files_are_small() {
    let mut circles = circles(&Code::read());
    for folder in DOORS {
        let of_door = self::circles(&Code::of_door(folder));
        circles.extend(of_door.into_iter().map(|circle| {
            let files = circle.into_iter();
            files.map(|file| format!("{folder}::{file}")).collect()
        }));
    }
    assert!(
        circles.is_empty(),
        "files that use each other in a circle: {circles:#?}"
    );
}

/// The circles of files that are too large.
fn circles(code: &Code) -> BTreeSet<BTreeSet<String>> {
    let mut uses: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
    let arrows = code.arrows();
    for (from, to) in &arrows {
        uses.entry(from).or_default().insert(to);
    }
    let reached: BTreeMap<_, _> = uses
        .keys()
        .map(|from| (*from, reach(&uses, from)))
        .collect();
    let mut circles = BTreeSet::new();
    for (from, far) in &reached {
        let circle: BTreeSet<_> = far
            .iter()
            .filter(|to| reached.get(*to).is_some_and(|back| back.contains(from)))
            .map(|module| module.join("::"))
            .collect();
        if circle.len() > LARGEST_CIRCLE {
            circles.insert(circle);
        }
    }
    circles
}

/// Files of the engine beside its drivers that wait, or act on threads of their own, in the system's time. The others ask their
/// group's clock.
const IN_SYSTEM_TIME: [&str; 5] = [
    "engine/calibrate.rs",
    "engine/clock.rs",
    "engine/group/end.rs",
    "engine/group/monitored.rs",
    "engine/group/opening.rs",
];

#[test]
fn the_engine_asks_its_groups_clock() {
    let code = Code::read();
    let asks_the_system = |file: &&File| {
        let product = file.text.split("#[cfg(test)]\nmod tests").next();
        product.is_some_and(|text| text.contains("Instant::now") || text.contains(".elapsed()"))
    };
    let files = code.files.values().filter(asks_the_system);
    let found: BTreeSet<_> = files
        .filter_map(|file| Some(file.path.to_str()?.split_once("src/")?.1))
        .filter(|path| path.starts_with("engine/") && !path.starts_with("engine/drive/"))
        .collect();
    assert_eq!(found, BTreeSet::from(IN_SYSTEM_TIME));
}

/// Where a module stands: `["engine", "links"]`, `["unisono_plan", "cost"]`; the root of the runtime's crate is empty.
type Module = Vec<String>;

struct File {
    path: PathBuf,
    text: String,
    /// Modules with a file of their own.
    children: BTreeSet<String>,
    /// Names that are defined elsewhere, and where.
    exports: BTreeMap<String, Vec<String>>,
    /// Paths from the root, as they are written.
    paths: BTreeSet<Vec<String>>,
}

/// The source files of the crates.
struct Code {
    files: BTreeMap<Module, File>,
}

impl Code {
    fn read() -> Self {
        let mut code = Self {
            files: BTreeMap::new(),
        };
        code.add(Vec::new(), root().join("core/src/lib.rs"));
        for (name, folder) in CRATES {
            code.add(
                vec![name.to_owned()],
                root().join(folder).join("src/lib.rs"),
            );
            let runtime = code.files.get_mut(&Vec::new()).expect("read before");
            runtime.children.insert(name.to_owned());
        }
        assert!(code.files.len() > 100, "{} files", code.files.len());
        code
    }

    /// A crate that uses the runtime, by itself.
    fn of_door(folder: &str) -> Self {
        let mut code = Self {
            files: BTreeMap::new(),
        };
        code.add(Vec::new(), root().join(folder).join("src/lib.rs"));
        if let Some(interface) = code.files.get_mut([INTERFACE.to_owned()].as_slice()) {
            interface.paths.clear();
        }
        code
    }

    fn add(&mut self, module: Module, path: PathBuf) {
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let mut reader = Reader {
            module: &module,
            children: BTreeSet::new(),
            exports: BTreeMap::new(),
            paths: BTreeSet::new(),
        };
        for item in &parsed.items {
            if let Item::Mod(item) = item
                && item.content.is_none()
                && is_built(&item.attrs)
            {
                reader.children.insert(item.ident.to_string());
            }
        }
        reader.visit_file(&parsed);
        let Reader {
            children,
            exports,
            paths,
            ..
        } = reader;
        for child in &children {
            let (folder, name) = (path.parent().expect("a folder"), path.file_stem());
            let folder = match name.and_then(|name| name.to_str()) {
                Some("lib" | "mod") => folder.to_path_buf(),
                _ => path.with_extension(""),
            };
            let own = [format!("{child}.rs"), format!("{child}/mod.rs")]
                .map(|name| folder.join(name))
                .into_iter()
                .find(|path| path.exists())
                .unwrap_or_else(|| panic!("no file for {child} of {path:?}"));
            self.add([module.clone(), vec![child.clone()]].concat(), own);
        }
        let file = File {
            path: path.strip_prefix(root()).expect("a source").to_path_buf(),
            text,
            children,
            exports,
            paths,
        };
        self.files.insert(module, file);
    }

    fn of(&self, module: &[String]) -> &File {
        &self.files[module]
    }

    /// The modules of the runtime's root, and the other crates.
    fn layers(&self) -> impl Iterator<Item = &String> {
        self.of(&[]).children.iter()
    }

    /// Which file uses which, without those that a file has of itself.
    fn arrows(&self) -> BTreeSet<(&Module, &Module)> {
        let mut arrows = BTreeSet::new();
        for (module, file) in &self.files {
            for path in &file.paths {
                let used = self.place_of(path);
                if used != module && !file.exports.values().any(|export| export == path) {
                    arrows.insert((module, used));
                }
            }
        }
        arrows
    }

    /// The file that has what `path` names.
    fn place_of(&self, path: &[String]) -> &Module {
        let mut module = Vec::new();
        for (at, segment) in path.iter().enumerate() {
            let file = self.of(&module);
            if file.children.contains(segment) {
                module.push(segment.clone());
            } else if let Some(export) = file.exports.get(segment)
                && export != path
            {
                return self.place_of(&[export.as_slice(), &path[at + 1..]].concat());
            } else {
                break;
            }
        }
        self.files.get_key_value(&module).expect("a module").0
    }
}

/// Collects the paths of one file.
struct Reader<'a> {
    module: &'a Module,
    children: BTreeSet<String>,
    exports: BTreeMap<String, Vec<String>>,
    paths: BTreeSet<Vec<String>>,
}

impl Reader<'_> {
    /// The root of the crate that has the file.
    fn home(&self) -> Module {
        let first = self.module.first().filter(|name| is_crate(name));
        first.cloned().into_iter().collect()
    }

    /// The same path from the root; `None` for one into a crate that is not ours or to a local name.
    fn absolute(&self, path: &[String]) -> Option<Vec<String>> {
        let first = path.first()?;
        let (mut base, rest) = match first.as_str() {
            "crate" => (self.home(), &path[1..]),
            name if is_crate(name) => (Vec::new(), path),
            "self" | "super" => (self.module.clone(), path),
            child if self.children.contains(child) => (self.module.clone(), path),
            _ => return None,
        };
        for segment in rest {
            match segment.as_str() {
                "self" => {}
                "super" => drop(base.pop()),
                name => base.push(name.to_owned()),
            }
        }
        Some(base)
    }

    fn add(&mut self, path: &[String]) {
        if let Some(path) = self.absolute(path) {
            self.paths.insert(path);
        }
    }

    fn add_tree(&mut self, tree: &UseTree, before: &[String], is_export: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&path.tree, &with(&path.ident), is_export),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_tree(tree, before, is_export);
                }
            }
            UseTree::Name(name) => self.add_use(&with(&name.ident), &name.ident, is_export),
            UseTree::Rename(name) => self.add_use(&with(&name.ident), &name.rename, is_export),
            UseTree::Glob(_) => self.add(before),
        }
    }

    fn add_use(&mut self, path: &[String], name: &syn::Ident, is_export: bool) {
        if is_export && let Some(path) = self.absolute(path) {
            self.exports.insert(name.to_string(), path);
        }
        self.add(path);
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Const(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Macro(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if is_built(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if is_built(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if is_built(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_export = !matches!(item.vis, syn::Visibility::Inherited);
        self.add_tree(&item.tree, &[], is_export);
    }

    /// Who may see something is no use of it.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if segments.len() > 1 {
            self.add(&segments);
        }
        visit::visit_path(self, path);
    }

    /// The arguments of a macro are not parsed: a path in them is `crate` and what follows.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let text = call.tokens.to_string().replace(' ', "");
        for (at, _) in text.match_indices("crate::") {
            let is_path = |c: char| c == ':' || c == '_' || c.is_alphanumeric();
            let rest = &text[at..];
            let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
            let path: Vec<_> = rest[..end].split("::").map(str::to_owned).collect();
            self.add(&path);
        }
        visit::visit_macro(self, call);
    }
}

/// Whether a name in a path is that of a crate beside the runtime's.
fn is_crate(name: &str) -> bool {
    CRATES.iter().any(|(known, _)| *known == name)
}

/// Whether the library has what bears these attributes.
fn is_built(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|it| it.path().is_ident("cfg"));
    conditions
        .filter_map(|it| it.parse_args::<Meta>().ok())
        .all(|condition| holds(&condition) != Some(false))
}

/// The value of `condition` in a build of the library, if it is known: nothing is known of targets.
fn holds(condition: &Meta) -> Option<bool> {
    const OF_TESTS: [&str; 4] = ["test", "doctest", "fuzzing", "loom"];
    match condition {
        Meta::Path(name) => OF_TESTS.iter().any(|it| name.is_ident(it)).then_some(false),
        Meta::NameValue(_) => None,
        Meta::List(list) => {
            let parse = Punctuated::<Meta, Token![,]>::parse_terminated;
            let parts = list.parse_args_with(parse).ok()?;
            let mut parts = parts.iter().map(holds);
            if list.path.is_ident("not") {
                parts.next()?.map(|it| !it)
            } else if list.path.is_ident("all") {
                parts.any(|it| it == Some(false)).then_some(false)
            } else {
                parts.all(|it| it == Some(false)).then_some(false)
            }
        }
    }
}

/// All that is reached from `from` by arrows.
fn reach<'a>(
    uses: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
    from: &'a Module,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        let new = uses.get(module).into_iter().flatten();
        next.extend(new.filter(|to| reached.insert(**to)));
    }
    reached
}

/// The names that begin each line that begins with `bullet`, in their order.
fn layers(text: &str, bullet: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(bullet));
    lines.flat_map(names).collect()
}

/// The names in backticks before the first colon.
fn names(line: &str) -> Vec<String> {
    let names = line.split(':').next().expect("a part");
    let names = names.split('`').skip(1).step_by(2);
    names.map(str::to_owned).collect()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
