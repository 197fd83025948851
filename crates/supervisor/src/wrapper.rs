//! Programs that start another one, and do not hand it the listener or may not change its user.

/// They change the user, which a worker has no capability for. Those of them that close descriptors cannot hand on a listener either.
const CHANGE_USER: [&str; 9] = [
    "sudo",
    "doas",
    "su",
    "runuser",
    "setpriv",
    "gosu",
    "su-exec",
    "chpst",
    "setuidgid",
];
/// node has its children inherit nothing but standard input, output and error (`uv_disable_stdio_inheritance`).
const RUN_SCRIPTS: [&str; 4] = ["npm", "npx", "yarn", "pnpm"];

/// Returns what to do where a command begins with such a program.
pub fn advice(command: &[String]) -> Option<String> {
    let program = command.first()?.rsplit('/').next()?;
    if CHANGE_USER.contains(&program) {
        return Some(format!(
            "a worker may not change its user by `{program}`: leave that out, and give the user by --user"
        ));
    }
    RUN_SCRIPTS.contains(&program).then(|| {
        format!(
            "`{program}` closes the listener that its script is to get: leave it out, and start what the script starts"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_are_named_by_whatever_path() {
        for (command, words) in [
            (
                "sudo -u www uvicorn --fd 3",
                "`sudo`: leave that out, and give the user by --user",
            ),
            ("/sbin/runuser -u www -- true", "`runuser`"),
            ("/usr/bin/npm start", "`npm` closes the listener"),
        ] {
            let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
            let advice = advice(&command).expect(words);
            assert!(advice.contains(words), "{advice}");
        }
        for command in [&[][..], &["uvicorn".to_owned()], &["sudoku".to_owned()]] {
            assert_eq!(advice(command), None);
        }
    }
}
